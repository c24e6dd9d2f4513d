"""The user's code: how it is named, found, packed and sent."""
