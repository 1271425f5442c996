-- The least rights of a role that sells stock with dlock in PostgreSQL, beside those of
-- postgres-grants.sql. Run it as the owner of the tables, with the name of your role
-- instead of `shop`.
GRANT SELECT, INSERT, UPDATE, DELETE ON dlock_stock, dlock_stock_record, dlock_stock_hold,
  dlock_stock_buyer, dlock_stock_return, dlock_stock_journal, dlock_stock_reader,
  dlock_stock_removed TO shop;
