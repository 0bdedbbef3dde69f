"""What is made of fits: analyses, comparisons, allocation, designs and forecasts."""
