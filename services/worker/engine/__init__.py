"""The engine: pools, capture and combine passes, decoding, and the loop that schedules them on one device."""
