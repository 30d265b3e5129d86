"""One forward pass of the architecture; knows no requests, blocks, files or HTTP."""
