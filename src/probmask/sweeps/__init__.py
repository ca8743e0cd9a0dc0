"""Many runs: a grid of configurations, trained side by side, each of them once."""
