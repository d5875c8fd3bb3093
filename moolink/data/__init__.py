"""Trees of tensors: values on the wire, layouts, batches and their memory."""
