"""Callbacks for training frameworks, one file each, imported when used."""
