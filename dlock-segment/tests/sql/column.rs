//! A column of a table of the shop.

use dlock_segment::Error;
use dlock_segment::sql::StockColumn;

use super::shop::Shop;

pub(crate) async fn a_column_never_goes_below_zero<S: Shop>(shop: &S) {
    let mut tx = shop.begin().await;
    S::run(&mut tx, "INSERT INTO product (id, stock) VALUES (7, 20)").await;
    S::run(&mut tx, "INSERT INTO part (code, stock) VALUES ('a''b', 1)").await;
    S::commit(tx).await.unwrap();
    let stock = StockColumn::new("product", "stock", "id").unwrap();
    let mut buyers = tokio::task::JoinSet::new();
    for _ in 0..6 {
        let (shop, stock) = (shop.clone(), stock.clone());
        buyers.spawn(async move {
            let mut bought = 0;
            for round in 0..6 {
                let mut tx = shop.begin().await;
                let taken = stock.deduct_in(&mut tx, 7, 1).await;
                bought += S::finish(tx, taken.map(|taken| taken && round != 3)).await;
            }
            bought
        });
    }
    let bought: i64 = buyers.join_all().await.into_iter().sum();
    assert_eq!(shop.number("SELECT stock FROM product WHERE id = 7").await, 20 - bought);

    let mut tx = shop.begin().await;
    assert!(!stock.deduct_in(&mut tx, 7, 21).await.unwrap(), "there are fewer");
    assert!(!stock.deduct_in(&mut tx, 8, 1).await.unwrap(), "there is no such row");
    assert!(stock.give_back_in(&mut tx, 7, 5).await.unwrap());
    let zero = stock.deduct_in(&mut tx, 7, 0).await;
    assert!(matches!(zero, Err(Error::Invalid(_))), "{zero:?}");
    let parts = StockColumn::new("part", "stock", "code").unwrap();
    assert!(parts.deduct_in(&mut tx, "a'b", 1).await.unwrap());
    assert!(!parts.deduct_in(&mut tx, "a'b", 1).await.unwrap());
    S::commit(tx).await.unwrap();
    assert_eq!(shop.number("SELECT stock FROM product WHERE id = 7").await, 25 - bought);
    let missing = StockColumn::new("nothing", "stock", "id").unwrap();
    let mut tx = shop.begin().await;
    assert!(missing.deduct_in(&mut tx, 7, 1).await.is_err());
    S::roll_back(tx).await;
}
