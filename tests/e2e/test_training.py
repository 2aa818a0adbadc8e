"""A model that is trained without a cache, then decodes what it learnt with one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jkv.decode.generate import Decoding, generate
from jkv.models.decoder import Decoder, cache_spec
from jkv.models.step import split_model

from ..tiny import make_config

CONFIG = make_config(vocab_size=16, embed_dim=32, num_heads=4, num_kv_heads=2, mlp_dim=32)
# A period in which a token does not say what follows it: only attention to earlier ones does.
TEXT = [1, 2, 1, 3, 1, 4, 5, 1, 6] * 3


def loss(model: Decoder, tokens: jax.Array) -> jax.Array:
    logits, _ = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])[:, 3:].mean()


@nnx.jit
def train(model: Decoder, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    value, gradient = nnx.value_and_grad(loss)(model, tokens)
    # Adam's bias correction mixes dtypes.
    with jax.numpy_dtype_promotion("standard"):
        optimizer.update(model, gradient)
    return value


def test_a_model_decodes_the_text_that_it_was_trained_on():
    model = Decoder(CONFIG, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    tokens = jnp.array([TEXT], jnp.int32)
    losses = [float(train(model, optimizer, tokens)) for _ in range(150)]
    assert losses[0] > 1
    assert np.max(losses[-10:]) < 0.05
    decoding = Decoding(*split_model(model), cache_spec(CONFIG, page_size=4, codec="f32"), CONFIG.vocab_size)
    (row,) = generate(decoding, [TEXT[:9]], max_new_tokens=len(TEXT) - 9)
    assert list(row.tokens) == TEXT[9:]
