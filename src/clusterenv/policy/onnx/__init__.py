"""Acting without torch: a module's forward pass as an ONNX graph, traced on the head and run by workers."""
