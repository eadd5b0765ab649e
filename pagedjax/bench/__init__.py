"""What `pagedjax bench` measures: whole answers of an engine, its steps kernel by kernel, and the limits of the device beside them."""
