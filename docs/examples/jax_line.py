"""A training step in JAX that jax.jit compiles, with the gradients of all ranks by optax.

pip install 'ringtrain[jax]' optax
ringtrainrun -np 2 python docs/examples/jax_line.py
"""

import jax
import jax.numpy as jnp
import optax

import ringtrain.jax as hvd


def main() -> None:
    hvd.init()
    key = jax.random.fold_in(jax.random.key(0), hvd.rank())  # other samples on each rank
    x = jax.random.normal(key, (256, 8))
    y = x @ jnp.arange(8.0) + 1

    parameters = {"weight": jax.random.normal(key, (8,)), "bias": jnp.zeros(())}
    parameters = hvd.broadcast_parameters(parameters, root_rank=0)  # start alike
    optimizer = hvd.DistributedGradientTransformation(optax.adam(0.2))  # the gradients of all ranks
    state = optimizer.init(parameters)

    @jax.jit
    def step(parameters, state, x, y):
        loss, gradients = jax.value_and_grad(mean_square)(parameters, x, y)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, hvd.allreduce(loss, name="loss")

    for number in range(1, 201):
        parameters, state, loss = step(parameters, state, x, y)
        if number % 50 == 0 and hvd.rank() == 0:
            print(f"step {number}: loss {float(loss):.4f}")
    hvd.shutdown()


def mean_square(parameters: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((x @ parameters["weight"] + parameters["bias"] - y) ** 2)


if __name__ == "__main__":
    main()
