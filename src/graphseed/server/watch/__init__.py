"""What the server shows of itself: prompt graphs, metrics, the page. Import from its modules."""
