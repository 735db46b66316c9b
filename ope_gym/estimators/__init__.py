"""The table of estimators and the mathematics of each: arrays only, no policy and no file."""
