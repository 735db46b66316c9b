"""The OPE tab of TensorBoard: a dynamic plugin that TensorBoard finds by its entry point."""
