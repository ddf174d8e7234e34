"""Calls need this of PyTorch and of the process: handles and graph breaks for torch.compile, selective checkpointing,
the names of modules, and one call at a time on a group. Nothing here knows attention.
"""
