"""A plain second implementation of the model and the recipe, for tests only.

It was written from the formulas alone, without sight of the library, so an error would have to be made twice to go
unnoticed. Clarity comes before speed: nothing here is for training.

- forward.py: the looped transformer's loss in bare torch operations
- muonh.py: one MuonH step and one AdamW step in numpy float64
- recipe.py: horizons, learning rates and the learning-rate multiplier
- accounting.py: parameter counts and FLOPs per token
- checkpoint.py: a checkpoint in the format of the paper authors' code
"""
