"""From the plan to Lightning's strategy, precision plugin and accelerator."""
