"""The experiments of the papers that lowtide implements, one folder a paper."""
