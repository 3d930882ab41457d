"""What a plan takes in memory, foretold: the programs of a step run on a ledger in place of tensors."""
