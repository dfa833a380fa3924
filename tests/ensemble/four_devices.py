"""Run by `test_spread` where jax sees four devices; writes what it found to argv[1]."""

import functools
import json
import sys

import diffrax
import jax
import jax.numpy as jnp
import numpy as np

import deepufm as ufm
from deepufm.ensemble import _spread, compiled, ensemble
from deepufm.sweep import Shape, UniformModesFamily

jax.config.update("jax_enable_x64", True)

COUNT, DEVICES, PLACE = 7, (1, 3, 4), 50
TEXTS = []


def recorded(function, platform):
    """Jits what runs on several devices, and keeps what its program became."""
    jitted = compiled(function, platform)
    if not isinstance(function, _spread.Sharded):
        return jitted

    def call(*arguments):
        arguments = *jitted.args, *arguments
        program = jitted.func.lower(*arguments).compile()
        TEXTS.append(program.compiled.as_text())
        return program(*arguments)

    return call


_spread.compiled = recorded


def members():
    """Runs an ensemble on the default device and on each number of devices."""
    a = 1e-2 * np.random.default_rng(0).uniform(size=(COUNT, 1))
    run = functools.partial(
        ensemble,
        lambda depth: ufm.HadamardFlow(num_classes=2, depth=depth),
        jnp.linspace(1.0, 3.0, COUNT),
        jnp.log(jnp.asarray(a)),
        stop=ufm.FinalTime(1e3),
        solver=diffrax.Heun(),
        rtol=1e-3,
        lanes=1,
    )
    found = {}
    for number in (0, *DEVICES):
        path = run(devices=jax.devices()[:number] or None)
        found[f"final {number}"] = path.final
        found[f"log_time {number}"] = path.final_log_time
        found[f"steps {number}"] = path.stats.num_steps
        found[f"reached {number}"] = path.outcome == ufm.Outcome.reached
    return found


def draws():
    """Draws each start alone, and once more in a batch on the last device."""
    shape = Shape(num_classes=4, per_class=1, width=1, depth=2)
    sizes = jnp.asarray(2.0), jnp.asarray(1.0), jnp.asarray(0.1)

    def model(key):
        return ufm.gaussian(key, num_classes=2, per_class=1, width=3, depth=2)

    def modes(key):
        return UniformModesFamily().member(shape, key, *sizes)[1]

    keys = jax.vmap(jax.random.key)(jnp.arange(PLACE + 1))
    elsewhere = jax.device_put(keys, jax.devices()[-1])
    found = {}
    for name, draw in [("model", model), ("modes", modes)]:
        alone = jax.jit(draw)(keys[PLACE])
        batch = jax.jit(jax.vmap(draw))(elsewhere)
        for i, leaf in enumerate(jax.tree.leaves(batch)):
            assert leaf.devices() == {jax.devices()[-1]}
            found[f"batch {name} {i}"] = leaf[PLACE]
            found[f"alone {name} {i}"] = jax.tree.leaves(alone)[i]
    return found


if __name__ == "__main__":
    assert len(jax.devices()) == max(DEVICES)
    results = members() | draws()
    np.savez(sys.argv[1], texts=json.dumps(TEXTS), **results)
