"""Watch a run: samples once a second, their history, and who serves and shows them."""
