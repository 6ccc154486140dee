"""TensorFlow's strategies on the MNIST CNN: mirrored, multi-worker mirrored, and one device.

The step is written on TensorFlow's own operations inside one `tf.function` that runs many steps:
Keras 3 does not support the multi-worker strategy, and its `fit` is slower than this loop.
The contender's name says the strategy:

    tf_mirrored        MirroredStrategy over as many logical CPU devices as there are processes
    tf_mirrored_whole  MirroredStrategy as it starts by default: one CPU device, all its cores
    tf_multi_worker    MultiWorkerMirroredStrategy, one process for each worker
    tf_one_device      OneDeviceStrategy, one CPU device, all its cores
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

from runner import Arguments, parse_arguments, rank_and_world, serve

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"

import numpy as np
import tensorflow as tf

NUM_CLASSES = 10
NUM_SAMPLES = 16_384
SHAPES = ((3, 3, 1, 32), (32,), (3, 3, 32, 64), (64,), (64 * 5 * 5, 10), (10,))


def strategy_for(arguments: Arguments) -> Any:
    """The strategy that the contender's name asks for, on the cores it may use."""
    kind = arguments.contender
    cores = arguments.processes * arguments.threads
    if kind == "tf_multi_worker":
        tf.config.threading.set_intra_op_parallelism_threads(arguments.threads)
        tf.config.threading.set_inter_op_parallelism_threads(arguments.threads)
        place_in_cluster()
        return tf.distribute.MultiWorkerMirroredStrategy()
    tf.config.threading.set_intra_op_parallelism_threads(cores)
    tf.config.threading.set_inter_op_parallelism_threads(cores)
    if kind == "tf_mirrored":
        (cpu,) = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * arguments.processes
        )
        return tf.distribute.MirroredStrategy([f"/cpu:{i}" for i in range(arguments.processes)])
    if kind == "tf_mirrored_whole":
        return tf.distribute.MirroredStrategy(["/cpu:0"])
    if kind == "tf_one_device":
        return tf.distribute.OneDeviceStrategy("/cpu:0")
    raise SystemExit(f"{kind} is none of the strategies that this file knows")


def place_in_cluster() -> None:
    """Say in TF_CONFIG what the harness says in torchrun's words."""
    rank, world_size = rank_and_world()
    first_port = int(os.environ["MASTER_PORT"])
    workers = [f"127.0.0.1:{first_port + i}" for i in range(world_size)]
    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
    )


def batches_for(strategy: Any, arguments: Arguments) -> Iterator[Any]:
    """Batches for each replica, its share of the global one, without end.

    Feed "fixed" goes round in eight batches made once; feed "memory" draws a new order for every
    epoch and gathers the samples from memory.
    """
    fixed = arguments.feed == "fixed"
    share = arguments.global_batch // strategy.num_replicas_in_sync
    num_samples = 8 * share if fixed else NUM_SAMPLES

    def of_worker(context: Any) -> Any:
        generator = np.random.default_rng(1000 + context.input_pipeline_id)
        images = tf.constant(generator.standard_normal((num_samples, 28, 28, 1), dtype=np.float32))
        classes = tf.constant(generator.integers(NUM_CLASSES, size=num_samples))
        order = tf.data.Dataset.range(num_samples)
        if fixed:
            # The batches stay as they are: what is measured is the step, not the gathering.
            data = tf.data.Dataset.from_tensor_slices(
                (tf.reshape(images, (8, share, 28, 28, 1)), tf.reshape(classes, (8, share)))
            )
            return data.repeat().prefetch(2)
        # Shuffling numbers and gathering in bulk is several times faster than shuffling samples.
        picked = order.shuffle(num_samples).repeat().batch(share, drop_remainder=True)
        return picked.map(lambda i: (tf.gather(images, i), tf.gather(classes, i))).prefetch(2)

    return iter(strategy.distribute_datasets_from_function(of_worker))


class Net:
    """Weights and Adam's moments, made inside the strategy's scope."""

    def __init__(self) -> None:
        generator = np.random.default_rng(0)

        def weights(shape: tuple[int, ...]) -> Any:
            fan_in = float(np.prod(shape[:-1])) or 1.0
            drawn = generator.standard_normal(shape) / np.sqrt(fan_in)
            return tf.Variable(drawn.astype(np.float32) if len(shape) > 1 else np.zeros(shape, "f"))

        self.weights = [weights(shape) for shape in SHAPES]
        self.first_moments = [tf.Variable(tf.zeros(shape)) for shape in SHAPES]
        self.second_moments = [tf.Variable(tf.zeros(shape)) for shape in SHAPES]
        self.powers = [tf.Variable(0.9), tf.Variable(0.999)]

    def __call__(self, images: Any) -> Any:
        w = self.weights
        hidden = tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(images, w[0], 1, "VALID"), w[1]))
        hidden = tf.nn.max_pool2d(hidden, 2, 2, "VALID")
        hidden = tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(hidden, w[2], 1, "VALID"), w[3]))
        hidden = tf.nn.max_pool2d(hidden, 2, 2, "VALID")
        return tf.reshape(hidden, (-1, SHAPES[4][0])) @ w[4] + w[5]

    def adam(self, strategy: Any, *gradients: Any) -> None:
        """TensorFlow's fused Adam kernel, on each replica's copy."""

        def on_copy(weight: Any, gradient: Any, m: Any, v: Any, power1: Any, power2: Any) -> None:
            tf.raw_ops.ResourceApplyAdam(
                var=weight.handle, m=m.handle, v=v.handle, beta1_power=power1, beta2_power=power2,
                lr=1e-3, beta1=0.9, beta2=0.999, epsilon=1e-8, grad=gradient,
            )  # fmt: skip

        extended = strategy.extended
        for weight, m, v, gradient in zip(
            self.weights, self.first_moments, self.second_moments, gradients, strict=True
        ):
            extended.update(weight, on_copy, (gradient, m, v, *self.powers), group=True)
        for power, beta in zip(self.powers, (0.9, 0.999), strict=True):
            extended.update(power, lambda p, b: p.assign(p * b), (beta,), group=True)


def training_steps(strategy: Any, net: Net, arguments: Arguments) -> Callable[[Any, Any], Any]:
    """A graph function that trains `count` steps from an iterator and returns the last loss."""
    global_batch = arguments.global_batch

    def on_replica(batch: tuple[Any, Any]) -> Any:
        images, classes = batch
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(classes, net(images))
            loss = tf.reduce_sum(losses) / global_batch
        gradients = tape.gradient(loss, net.weights)
        context = tf.distribute.get_replica_context()
        summed = context.all_reduce(tf.distribute.ReduceOp.SUM, gradients)
        context.merge_call(net.adam, args=tuple(summed))
        return loss

    @tf.function  # type: ignore[untyped-decorator]
    def many(iterator: Any, count: Any) -> Any:
        loss = tf.constant(0.0)
        for _ in tf.range(count):
            parts = strategy.run(on_replica, args=(next(iterator),))
            loss = strategy.reduce(tf.distribute.ReduceOp.SUM, parts, axis=None)
        return loss

    return many  # type: ignore[no-any-return]


def main() -> None:
    arguments = parse_arguments()
    if arguments.model != "mnist_cnn":
        raise SystemExit(f"TensorFlow's side is written for mnist_cnn, not {arguments.model}")
    strategy = strategy_for(arguments)
    with strategy.scope():
        net = Net()
    many = training_steps(strategy, net, arguments)
    iterator = batches_for(strategy, arguments)
    alone = arguments.contender != "tf_multi_worker"
    rank = 0 if alone else rank_and_world()[0]
    serve(
        arguments,
        lambda count: float(many(iterator, tf.constant(count))),
        rank=rank,
        meet=1 if alone else None,
        versions={"tensorflow": tf.__version__},
    )


if __name__ == "__main__":
    main()
