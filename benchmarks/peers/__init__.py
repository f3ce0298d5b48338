"""protrain beside other ways to train in little memory: `protrain bench`. README.md says how to add a peer."""
