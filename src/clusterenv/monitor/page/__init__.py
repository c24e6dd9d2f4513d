"""Show a run in the browser: a live page (`serve.py`, needs the extra `dashboard`), and a file of it (`report.py`)."""
