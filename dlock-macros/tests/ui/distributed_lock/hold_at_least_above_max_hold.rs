use dlock::{Result, distributed_lock};

#[distributed_lock(key = "order:{order_id}", max_hold = "1m", hold_at_least = "5m")]
async fn pay(order_id: u64) -> Result<u64> {
    Ok(order_id)
}

fn main() {
    let _ = pay(7);
}
