use dlock::{Result, distributed_lock};

#[distributed_lock(key = "order:{order_id}")]
async fn pay() -> Result<()> {
    Ok(())
}

fn main() {
    let _ = pay();
}
