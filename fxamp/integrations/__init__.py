"""Trainers of other people: Lightning and Fabric, Hugging Face's Trainer, torchtitan's GraphTrainer.

Imports `convert`, the views, the census and the loss scaler. What a user imports are `fxamp.lightning` and
`fxamp.huggingface`, which load the trainer's own package when they are first asked for a name.
"""
