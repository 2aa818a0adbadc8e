"""The glossary of logical axis names. Knows no mesh and no array."""

AXES: dict[str, str] = {
    "seq": "rows of a batch, one sequence each",
    "time": "a row's new tokens in one step, padded to a bucket",
    "token": "all new tokens of a step, over its sequences",
    "q_head": "query heads",
    "kv_head": "key and value heads",
    "head_dim": "entries of one head",
    "latent": "entries of a compressed key-value vector",
    "rope": "rotary entries beside a latent",
    "page": "pages of a pool",
    "slot": "tokens of a page",
    "layer": "decoder layers",
    "embed": "width of the residual stream",
    "mlp": "width of a gated MLP",
    "expert": "experts of a mixture",
    "vocab": "token ids",
    "context": "stripes of one sequence's pages",
}

# No mesh axis splits them: every device has them whole.
NEVER_SPLIT = ("time", "token", "layer", "head_dim", "slot", "latent", "rope")
