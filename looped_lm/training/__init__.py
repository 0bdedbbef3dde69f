"""The recipe: the Lightning module, optimizer, schedules and the settings that follow from them."""
