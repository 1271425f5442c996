use dlock::{Result, distributed_lock};

#[distributed_lock("order:{order_id}")]
async fn pay(order_id: u64) -> Result<u64> {
    Ok(order_id)
}

fn main() {
    let _ = pay(7);
}
