"""The census: one real step of any model is run and watched, and what ran is compared with the plan, node by node.

Imports `convert`, what Dynamo captures, and the watch.
The command, the gate and the training step use it. Nothing here decides anything.
"""
