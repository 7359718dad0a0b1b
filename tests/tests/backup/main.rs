//! Backups, bitmaps and restores, offline and of running disks.

mod backup_crash;
mod backup_sources;
mod bitmap_backup;
mod bitmap_bases;
mod bitmap_matrix;
mod checkpoints;
mod live_backup;
mod live_increments;
mod moment_points;
mod point_faults;
mod point_scene;
mod points;
mod recovered_bitmaps;
mod restores;
