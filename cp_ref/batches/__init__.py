"""The tensors of a batch.

tensors          dtypes, devices, autocast, derivatives; formats of users as packed rows
sharding         cut a global tensor into slices, and put slices together
masks            makers of areas: masks by name
area_rows        areas as a tensor
foreign_masks    readers of others' masks
"""
