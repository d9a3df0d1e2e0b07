"""fedsim's figures: every contender in one run, each in an environment of its own. See README.md."""
