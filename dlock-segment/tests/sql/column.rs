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
                match stock.deduct_in(&mut tx, 7, 1).await {
                    Ok(true) if round != 3 => {
                        S::commit(tx).await.unwrap();
                        bought += 1;
                    }
                    Ok(_) | Err(Error::Store(_)) => S::roll_back(tx).await,
                    Err(other) => panic!("{other}"),
                }
            }
            bought
        });
    }
    let mut bought = 0;
    while let Some(some) = buyers.join_next().await {
        bought += some.unwrap();
    }
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
