"""How a Trainer is put together: engine, accelerator, callbacks, and the rooms behind `_hftrainer`."""
