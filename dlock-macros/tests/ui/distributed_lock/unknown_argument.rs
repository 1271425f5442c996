use dlock::{Result, distributed_lock};

#[distributed_lock(key = "order:{orderid}")]
async fn pay(order_id: u64, (amount, _): (u64, u8)) -> Result<u64> {
    Ok(order_id + amount)
}

fn main() {
    let _ = pay(7, (8, 9));
}
