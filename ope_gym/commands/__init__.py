"""The commands of `ope-gym`: each is a function, whose signature and docstring are its options."""
