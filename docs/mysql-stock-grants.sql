-- The least rights of a user that sells stock with dlock in MariaDB or MySQL, beside those
-- of mysql-grants.sql. Run it in the database of the tables, with your user instead of
-- `shop`.
GRANT SELECT, INSERT, UPDATE, DELETE ON dlock_stock TO shop;
GRANT SELECT, INSERT, UPDATE, DELETE ON dlock_stock_record TO shop;
GRANT SELECT, INSERT, UPDATE, DELETE ON dlock_stock_hold TO shop;
GRANT SELECT, INSERT, UPDATE, DELETE ON dlock_stock_buyer TO shop;
GRANT SELECT, INSERT, UPDATE, DELETE ON dlock_stock_return TO shop;
GRANT SELECT, INSERT, UPDATE, DELETE ON dlock_stock_journal TO shop;
GRANT SELECT, INSERT, UPDATE, DELETE ON dlock_stock_reader TO shop;
GRANT SELECT, INSERT, UPDATE, DELETE ON dlock_stock_removed TO shop;
