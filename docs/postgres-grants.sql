-- The least rights of a role that locks with dlock in PostgreSQL. Run it as the owner of
-- the tables, with the name of your role instead of `shop`.
GRANT SELECT, INSERT, UPDATE, DELETE ON dlock_lock TO shop;
GRANT SELECT, UPDATE ON dlock_meta TO shop;
-- Only for lock_in and its variants. DELETE is for the sweep of old rows:
GRANT SELECT, INSERT, UPDATE, DELETE ON dlock_row TO shop;
