use dlock::{Result, distributed_lock};

#[distributed_lock(key = "order:{order_id}", ttl = "30 parsecs")]
async fn pay(order_id: u64) -> Result<u64> {
    Ok(order_id)
}

fn main() {
    let _ = pay(7);
}
