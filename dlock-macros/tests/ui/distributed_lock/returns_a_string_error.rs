use dlock::distributed_lock;

#[distributed_lock(key = "order:{order_id}")]
async fn pay(order_id: u64) -> Result<u64, String> {
    Ok(order_id)
}

fn main() {
    let _ = pay(7);
}
