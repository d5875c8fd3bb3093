#pragma once

namespace moolink::injection {

class Report;

void calls_over_tcp(Report& report);
void calls_over_shm(Report& report);
void lends_over_shm(Report& report);
void group_over_shm(Report& report);
void group_over_tcp(Report& report);
void rounds_over_shm(Report& report);
void rounds_over_tcp(Report& report);

}  // namespace moolink::injection
