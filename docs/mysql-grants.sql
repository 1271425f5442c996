-- The least rights of a user that locks with dlock in MariaDB or MySQL. Run it in the
-- database of the tables, with your user instead of `shop`. Never add SUPER, READ_ONLY ADMIN
-- (MariaDB) or CONNECTION_ADMIN (MySQL): such a user writes to a replica as well.
GRANT SELECT, INSERT, UPDATE, DELETE ON dlock_lock TO shop;
GRANT SELECT, UPDATE ON dlock_meta TO shop;
-- Only for lock_in and its variants. DELETE is for the sweep of old rows:
GRANT SELECT, INSERT, UPDATE, DELETE ON dlock_row TO shop;
-- Only for early versions of MySQL 8 (8.0.12 is one), which refuse SELECT ... FOR UPDATE to a
-- user with rights on tables alone. Write the name of your database instead of `dlock`.
-- GRANT LOCK TABLES ON dlock.* TO shop;
