"""One file a framework, each imported when it is used."""
