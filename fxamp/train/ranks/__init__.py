"""Training on several ranks: what they exchange, what they agree on, and what is spread over them.

Imports views and the contract.
The loss scale and the window use it to agree across ranks; the training step uses it to exchange gradients.
"""
