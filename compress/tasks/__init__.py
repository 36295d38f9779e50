"""Tasks of lm-evaluation-harness, answered by our engine.

`harness_model` is the engine as the harness sees it; `run` calls the harness, and imports it only when tasks are asked for,
because that takes seconds. No other code about the harness may be elsewhere. Start with `run`.
"""
