"""Training on several ranks: what they exchange, what they agree on, and what is spread over them.

Imports the converted module and the contract.
The loss scale and the window agree by it, and the training step asks it what to exchange.
"""
