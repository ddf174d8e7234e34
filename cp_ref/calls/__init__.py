"""The public functions of both packages, declared: a signature, a docstring, and how a call's arguments are read.

declared         `implements`: a function takes the signature and the docstring of its stub
plan_arguments   `make_plan`, `supports` and `Plan.update`
attention_call   `attention`
layer            what a layer is: its tensors and options, and how a call of it is checked
linear_calls     `linear_attention` and `causal_conv1d`
sparse_calls     `select_keys`, `sparse_attention` and `index_loss`
scores           the one definition of ALiBi, score_mod and dropout
score_mod        a user's function of scores
"""
