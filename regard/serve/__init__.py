"""An OpenAI-compatible server over the one engine: `regard serve MODEL`.

The way of a request: `app.py` reads and checks it (`edge.py`, `schemas.py`), `prompts.py` makes ids of its text (in
`sandbox.py`, where that may take long) and it goes to the thread that owns the model's engine (`model_worker.py`),
whose events come back through a bounded queue and go out as JSON or as server-sent events, in OpenAI's words
(`answers.py`).
"""
