"""Tasks beyond classes of images, as settings over the tiny scenario of conftest."""

from __future__ import annotations

DATA = "data={{dataset: {}, samples: 60, test_samples: 40, batch: {{sampling: poisson, size: 4}}}}"
TASKS = {
    "numbers": [DATA.format("diabetes"), "task={loss: mse, metrics: [rmse, mae, mse, r2]}", "model.name=linear"],
    "numbers, huber": [DATA.format("diabetes"), "task.loss=huber", "model={name: mlp, hidden: [5]}"],
    "labels": [
        DATA.format("synthetic-labels"),
        "task={loss: binary-cross-entropy, metrics: [micro-f1, macro-f1, subset-accuracy, mean-average-precision]}",
        "model={name: mlp, hidden: [5], activation: tanh}",
    ],
    "tokens": [
        DATA.format("synthetic-words"),
        "task.metrics=[accuracy, balanced-accuracy, macro-f1, log-loss]",
        "model={name: text, width: 3}",
    ],
}
