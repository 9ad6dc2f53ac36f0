from tests.adapters.downstream import driver, libraries

driver.declare_operators()
#: Where no library is installed, or chosen.
collect_ignore = [] if libraries.is_installed("trl") else ["test_gallery.py", "test_trl_scripts.py"]
collect_ignore += [] if libraries.chosen() else ["test_libraries.py"]
