"""Plain second implementation of the specification, for tests only.

Written from the formulas of the specification alone and without sight of the library, so that an error
would have to be made twice to go unnoticed. Clarity comes before speed: nothing here is for training.

- forward.py: the looped transformer's loss in bare torch operations
- muonh.py: one MuonH step and one AdamW step in numpy float64
- recipe.py: horizons, learning rates and the learning-rate multiplier
- accounting.py: parameter counts and FLOPs per token
"""
