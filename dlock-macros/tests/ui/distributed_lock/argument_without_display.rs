use dlock::{Result, distributed_lock};

#[distributed_lock(key = "order:{order}")]
async fn pay(order: Vec<u8>) -> Result<usize> {
    Ok(order.len())
}

fn main() {
    let _ = pay(vec![]);
}
