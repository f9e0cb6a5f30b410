"""Bug or rounding? One model run in every way it can be run, each held against float64."""
